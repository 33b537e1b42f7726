//! Offloading of objects to disks, and promotion to memory.

use super::DEFAULT_TENANT;
use crate::dialect::Dialect;
use crate::pack::{
    Pack, PackError, PackReader, PackWriter, Unpack, UnpackError, WireString, layout, type_marker,
};

/// The master's settings for storing objects on disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageConfig<S> {
    /// Directory of a shared file system; empty for none.
    pub fsdir: S,
    /// Whether files on disk are evicted.
    pub enable_disk_eviction: bool,
    /// Maximum bytes on disk; 0 for no limit.
    pub quota_bytes: u64,
}

layout! { StorageConfig<S> { fsdir, enable_disk_eviction, quota_bytes } }

/// Location of an object on a client's disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageObjectMetadata<S> {
    /// Id of the bucket file.
    pub bucket_id: i64,
    /// Offset in the bucket, in bytes.
    pub offset: i64,
    /// Length of the key in bytes.
    pub key_size: i64,
    /// Size of the object in bytes.
    pub data_size: i64,
    /// Endpoint of the node as `host:port`.
    pub transport_endpoint: S,
}

layout! { StorageObjectMetadata<S> { bucket_id, offset, key_size, data_size, transport_endpoint } }

/// An object to offload or promote.
///
/// Until 0.3.11 a client that reports such objects sends only keys, so the size is 0 then.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadTask<S> {
    /// Tenant of the object. Since 0.3.12.
    pub tenant_id: S,
    pub key: S,
    /// Size of the object in bytes.
    pub size: i64,
}

/// The newest layout of [`super::OffloadTask`].
mod tenanted {
    use crate::pack::layout;

    pub(super) struct TenantOffloadTask<S> {
        pub(super) tenant_id: S,
        pub(super) key: S,
        pub(super) size: i64,
    }

    layout! { TenantOffloadTask<S> { tenant_id, key, size } }
}

impl<S: Pack> Pack for OffloadTask<S> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        if dialect < Dialect::V0_3_12 {
            S::literal(dialect, out);
        } else {
            tenanted::TenantOffloadTask::<S>::literal(dialect, out);
        }
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        if writer.dialect() < Dialect::V0_3_12 {
            return self.key.write(writer);
        }
        self.tenant_id.write(writer)?;
        self.key.write(writer)?;
        self.size.write(writer)
    }
}

impl<'a, S: WireString<'a>> Unpack<'a> for OffloadTask<S> {
    fn min_size(dialect: Dialect) -> usize {
        if dialect < Dialect::V0_3_12 {
            S::min_size(dialect)
        } else {
            tenanted::TenantOffloadTask::<S>::min_size(dialect)
        }
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        if reader.dialect() < Dialect::V0_3_12 {
            return Ok(Self { tenant_id: S::from(DEFAULT_TENANT), key: reader.read()?, size: 0 });
        }
        let tenanted::TenantOffloadTask { tenant_id, key, size } = reader.read()?;
        Ok(Self { tenant_id, key, size })
    }
}

/// Objects that a client should offload or promote. Until 0.3.11 a map from keys to sizes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OffloadTasks<S>(pub Vec<OffloadTask<S>>);

impl<S: Pack> Pack for OffloadTasks<S> {
    fn literal(dialect: Dialect, out: &mut Vec<u8>) {
        if dialect < Dialect::V0_3_12 {
            out.push(type_marker::MAP);
            S::literal(dialect, out);
            i64::literal(dialect, out);
        } else {
            Vec::<OffloadTask<S>>::literal(dialect, out);
        }
    }

    fn write(&self, writer: &mut PackWriter<'_>) -> Result<(), PackError> {
        if writer.dialect() >= Dialect::V0_3_12 {
            return self.0.write(writer);
        }
        writer.length(self.0.len())?;
        for task in &self.0 {
            task.key.write(writer)?;
            task.size.write(writer)?;
        }
        Ok(())
    }
}

impl<'a, S: WireString<'a>> Unpack<'a> for OffloadTasks<S> {
    fn min_size(_: Dialect) -> usize {
        1
    }

    fn read(reader: &mut PackReader<'a>) -> Result<Self, UnpackError> {
        if reader.dialect() >= Dialect::V0_3_12 {
            return reader.read().map(Self);
        }
        // Each entry has a size of eight bytes, which bounds the count.
        let count = reader.count::<i64>()?;
        let mut tasks = Vec::with_capacity(count);
        for _ in 0..count {
            let (key, size) = (reader.read()?, reader.read()?);
            tasks.push(OffloadTask { tenant_id: S::from(DEFAULT_TENANT), key, size });
        }
        Ok(Self(tasks))
    }
}
