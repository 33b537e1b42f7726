//! Buffers that Python registers by address and size, and views of them. All unsafe code of this crate is here, except in its tests.
//!
//! Nothing can check that an address from Python is valid, so [`RegisteredMemory::register`] is unsafe. Every address that was not
//! registered is refused. The two callers are here as well: [`RegisteredMemory::register_for_python`], which relies on the
//! documentation of `register_buffer`, and [`NewBuffers`], which owns the memory.
#![expect(unsafe_code, reason = "Python passes memory as addresses")]

use std::collections::BTreeMap;

use parking_lot::Mutex;
#[cfg(feature = "extension-module")]
use pyo3::{prelude::*, types::PyByteArray};

/// Address and size in bytes of memory in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRange {
    pub address: usize,
    pub size: usize,
}

impl MemoryRange {
    /// The address after the last byte. `None` if there is none, or for an empty range or one at address 0.
    fn end(self) -> Option<usize> {
        let end = self.address.checked_add(self.size)?;
        let is_valid = self.address != 0 && self.size != 0 && isize::try_from(self.size).is_ok();
        is_valid.then_some(end)
    }
}

/// Why a range was not registered, or is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    #[error("an empty range, or one that exceeds the address space")]
    Invalid,
    #[error("the range overlaps a registered buffer")]
    Overlapping,
    #[error("no registered buffer has this range")]
    Unknown,
    #[error("two ranges to write to overlap")]
    Aliased,
}

/// The registered buffers of a store.
#[derive(Debug, Default)]
pub struct RegisteredMemory {
    /// End of each buffer by its start.
    buffers: Mutex<BTreeMap<usize, usize>>,
}

impl RegisteredMemory {
    /// Registers a buffer.
    ///
    /// # Errors
    /// [`RegistrationError::Invalid`] or [`RegistrationError::Overlapping`].
    ///
    /// # Safety
    /// Until the buffer is unregistered and all calls that began before have returned:
    /// - the range is mapped, readable, writable and initialized, and in one allocation or adjacent mappings without a gap;
    /// - while a call of the store reads a part of it, nothing writes to that part;
    /// - while a call of the store writes to a part of it, nothing else reads or writes that part, neither another call nor a
    ///   reference held elsewhere.
    pub unsafe fn register(&self, range: MemoryRange) -> Result<(), RegistrationError> {
        let end = range.end().ok_or(RegistrationError::Invalid)?;
        let mut buffers = self.buffers.lock();
        // Buffers do not overlap, so only the last one that starts before the end can reach into the range.
        if buffers.range(..end).next_back().is_some_and(|(_, before)| *before > range.address) {
            return Err(RegistrationError::Overlapping);
        }
        buffers.insert(range.address, end);
        Ok(())
    }

    /// Registers a buffer for Python code, which has no `unsafe`.
    ///
    /// # Errors
    /// As [`Self::register`].
    #[cfg(feature = "extension-module")]
    pub(crate) fn register_for_python(&self, range: MemoryRange) -> Result<(), RegistrationError> {
        // SAFETY: the only caller is Python's `register_buffer`, whose documentation states this contract. Python code that passes
        // the address of memory which it does not own can corrupt the process here as it can with `ctypes`.
        unsafe { self.register(range) }
    }

    /// Removes the buffer that starts at `address`.
    ///
    /// # Errors
    /// [`RegistrationError::Unknown`] if there is none.
    pub fn unregister(&self, address: usize) -> Result<(), RegistrationError> {
        self.buffers.lock().remove(&address).map(drop).ok_or(RegistrationError::Unknown)
    }

    /// Checks that a range lies in a registered buffer, or in several that are adjacent.
    fn check(&self, range: MemoryRange) -> Result<(), RegistrationError> {
        let end = range.end().ok_or(RegistrationError::Unknown)?;
        let buffers = self.buffers.lock();
        let mut covered = range.address;
        while covered < end {
            let buffer = buffers.range(..=covered).next_back();
            match buffer {
                Some((_, buffer_end)) if *buffer_end > covered => covered = *buffer_end,
                _ => return Err(RegistrationError::Unknown),
            }
        }
        Ok(())
    }

    /// A part of registered memory to read from.
    ///
    /// # Errors
    /// [`RegistrationError::Unknown`] if it is not registered.
    pub fn source(&self, range: MemoryRange) -> Result<&[u8], RegistrationError> {
        self.check(range)?;
        // SAFETY: the range is not empty, has no null address and at most isize::MAX bytes. It is registered, so by the contract of
        // `register` it is mapped and initialized, and nothing writes to it during a call of the store.
        Ok(unsafe {
            std::slice::from_raw_parts(std::ptr::with_exposed_provenance(range.address), range.size)
        })
    }

    /// Parts of registered memory to write to, in the same order.
    ///
    /// # Errors
    /// [`RegistrationError::Unknown`] if one is not registered, and [`RegistrationError::Aliased`] if two of them overlap.
    #[expect(
        clippy::mut_from_ref,
        reason = "the memory is Python's, and the ranges are checked not to overlap"
    )]
    pub fn destinations(&self, ranges: &[MemoryRange]) -> Result<Vec<&mut [u8]>, RegistrationError> {
        let mut sorted = ranges.to_vec();
        sorted.sort_unstable_by_key(|range| range.address);
        for range in &sorted {
            self.check(*range)?;
        }
        let overlaps = |pair: &[MemoryRange]| matches!(pair, [one, next] if one.end() > Some(next.address));
        if sorted.windows(2).any(overlaps) {
            return Err(RegistrationError::Aliased);
        }
        let view = |range: &MemoryRange| {
            let start = std::ptr::with_exposed_provenance_mut(range.address);
            // SAFETY: as for `source`. The views of one call do not overlap, and by the contract of `register` nothing else uses
            // this part during the call.
            unsafe { std::slice::from_raw_parts_mut(start, range.size) }
        };
        Ok(ranges.iter().map(view).collect())
    }
}

/// New Python objects that objects of the store are read into. Python code gets them when they are complete.
#[cfg(feature = "extension-module")]
pub(crate) struct NewBuffers<'py> {
    memory: RegisteredMemory,
    handles: Vec<Bound<'py, PyByteArray>>,
}

#[cfg(feature = "extension-module")]
impl<'py> NewBuffers<'py> {
    pub(crate) fn new() -> Self {
        Self { memory: RegisteredMemory::default(), handles: Vec::new() }
    }

    /// Creates an object of `class`, a subclass of `bytearray` without a constructor of its own, and registers its memory.
    ///
    /// # Errors
    /// What Python raises, such as `MemoryError`.
    pub(crate) fn allocate(&mut self, class: &Bound<'py, PyAny>, size: u64) -> PyResult<MemoryRange> {
        let handle = class.call1((size,))?.cast_into::<PyByteArray>()?;
        let range = MemoryRange { address: handle.data().expose_provenance(), size: handle.len() };
        // SAFETY: the object is new, initialized with zeros, and no other code has a reference to it. `handles` keeps it, and so its
        // memory, until `self` is consumed or dropped, which ends the registration.
        let registered = unsafe { self.memory.register(range) };
        registered.map_err(|error| pyo3::exceptions::PyRuntimeError::new_err(error.to_string()))?;
        self.handles.push(handle);
        Ok(range)
    }

    /// The registrations of all objects.
    pub(crate) fn memory(&self) -> &RegisteredMemory {
        &self.memory
    }

    /// The objects, in the order of their creation.
    pub(crate) fn into_handles(self) -> Vec<Bound<'py, PyByteArray>> {
        self.handles
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn register(memory: &RegisteredMemory, address: usize, size: usize) -> Result<(), RegistrationError> {
        // SAFETY: tests that take a view of what they register pass the address of their own array, and use it through views only.
        unsafe { memory.register(range(address, size)) }
    }

    fn range(address: usize, size: usize) -> MemoryRange {
        MemoryRange { address, size }
    }

    fn registered(bytes: &mut [u8]) -> (RegisteredMemory, usize) {
        let memory = RegisteredMemory::default();
        let address = bytes.as_mut_ptr().expose_provenance();
        register(&memory, address, bytes.len()).unwrap();
        (memory, address)
    }

    #[test]
    fn buffers_are_valid_and_do_not_overlap() {
        let memory = RegisteredMemory::default();
        assert_eq!(register(&memory, 4096, 100), Ok(()));
        for (address, size) in [(4096, 100), (4096, 1), (4195, 1), (4000, 97), (4000, 1000), (4100, 10)] {
            assert_eq!(register(&memory, address, size), Err(RegistrationError::Overlapping), "{address}");
        }
        for (address, size) in [(0, 10), (10, 0), (usize::MAX, 2), (1, usize::MAX - 1)] {
            assert_eq!(register(&memory, address, size), Err(RegistrationError::Invalid), "{address}");
        }
        assert_eq!(register(&memory, 4196, 1), Ok(()));
        assert_eq!(register(&memory, 4000, 96), Ok(()));
        assert_eq!(memory.unregister(4097), Err(RegistrationError::Unknown));
        assert_eq!(memory.unregister(4096), Ok(()));
        assert_eq!(memory.unregister(4096), Err(RegistrationError::Unknown));
        assert_eq!(register(&memory, 4096, 100), Ok(()));
    }

    #[test]
    fn only_registered_memory_is_viewed() {
        let mut bytes = *b"0123456789";
        let (memory, at) = registered(&mut bytes);
        assert_eq!(memory.source(range(at + 2, 3)), Ok(&b"234"[..]));
        assert_eq!(memory.source(range(at, 10)), Ok(&b"0123456789"[..]));
        for (address, size) in [(at - 1, 3), (at + 8, 3), (at + 10, 1), (at, 0), (at, usize::MAX), (0, 1)] {
            assert_eq!(memory.source(range(address, size)), Err(RegistrationError::Unknown));
            assert!(memory.destinations(&[range(address, size)]).is_err());
        }
        memory.unregister(at).unwrap();
        assert!(memory.source(range(at + 2, 3)).is_err());
    }

    #[test]
    fn written_views_are_disjoint_and_in_order() {
        let mut bytes = *b"0123456789";
        let (memory, at) = registered(&mut bytes);
        let views = memory.destinations(&[range(at + 6, 2), range(at, 2)]).unwrap();
        for (view, new) in views.into_iter().zip([b"xy", b"ab"]) {
            view.copy_from_slice(new);
        }
        assert_eq!(memory.source(range(at, 10)), Ok(&b"ab2345xy89"[..]));
        let aliased = memory.destinations(&[range(at + 6, 2), range(at, 2), range(at + 7, 1)]);
        assert_eq!(aliased.unwrap_err(), RegistrationError::Aliased);
    }

    #[test]
    fn a_view_may_span_adjacent_buffers() {
        let mut bytes = *b"0123456789";
        let at = bytes.as_mut_ptr().expose_provenance();
        let memory = RegisteredMemory::default();
        register(&memory, at, 4).unwrap();
        register(&memory, at + 5, 5).unwrap();
        assert!(memory.source(range(at + 2, 5)).is_err(), "byte 4 is not registered");
        register(&memory, at + 4, 1).unwrap();
        assert_eq!(memory.source(range(at + 2, 5)), Ok(&b"23456"[..]));
    }
}
