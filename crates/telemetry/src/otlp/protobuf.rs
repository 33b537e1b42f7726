//! Writer for the protocol buffers wire format, as far as needed here: <https://protobuf.dev/programming-guides/encoding/>.

/// Maximum values of a one-byte and of a two-byte varint.
const ONE_BYTE: usize = 0x7f;
const TWO_BYTES: usize = 0x3fff;

/// Wire types of protobuf fields.
#[derive(Clone, Copy)]
enum ProtobufWireType {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
    Fixed32 = 5,
}

/// Appends protobuf fields to a buffer. Omitted fields have their default value.
#[derive(Debug, Default)]
pub(super) struct ProtobufWriter {
    out: Vec<u8>,
}

#[must_use]
pub(super) struct OpenProtobufMessage {
    /// Offset of its first byte after the length.
    start: usize,
}

impl ProtobufWriter {
    /// A writer with a buffer of `bytes` bytes.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { out: Vec::with_capacity(bytes) }
    }

    /// The encoded bytes so far.
    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    #[inline]
    fn key(&mut self, field: u32, wire: ProtobufWireType) {
        self.raw_varint(u64::from(field << 3 | wire as u32));
    }

    #[inline]
    fn raw_varint(&mut self, mut value: u64) {
        while value > ONE_BYTE as u64 {
            self.out.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.out.push(value as u8);
    }

    /// Writes an `int64`, `bool` or `enum` field.
    #[inline]
    pub(super) fn varint(&mut self, field: u32, value: u64) {
        self.key(field, ProtobufWireType::Varint);
        self.raw_varint(value);
    }

    /// Writes a `fixed64` or `double` field; the field number must be below 16.
    #[inline]
    pub(super) fn fixed64(&mut self, field: u32, value: [u8; 8]) {
        let mut all = [(field << 3 | ProtobufWireType::Fixed64 as u32) as u8; 9];
        all[1..].copy_from_slice(&value);
        self.out.extend_from_slice(&all);
    }

    /// Writes a field of type `fixed32`.
    #[inline]
    pub(super) fn fixed32(&mut self, field: u32, value: [u8; 4]) {
        self.key(field, ProtobufWireType::Fixed32);
        self.out.extend_from_slice(&value);
    }

    /// Writes a `string`, `bytes` or already encoded message field.
    #[inline]
    pub(super) fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.length_prefix(field, bytes.len());
        self.out.extend_from_slice(bytes);
    }

    /// Appends fields that are already encoded.
    pub(super) fn append_encoded(&mut self, fields: &[u8]) {
        self.out.extend_from_slice(fields);
    }

    /// Writes the key and length of a field of `bytes` bytes that follow.
    #[inline]
    pub(super) fn length_prefix(&mut self, field: u32, bytes: usize) {
        if field < 16 && bytes <= ONE_BYTE {
            self.out.extend_from_slice(&[(field << 3 | ProtobufWireType::Length as u32) as u8, bytes as u8]);
        } else {
            self.long_length_prefix(field, bytes);
        }
    }

    /// A separate function, to keep the common path small.
    #[cold]
    #[inline(never)]
    fn long_length_prefix(&mut self, field: u32, bytes: usize) {
        self.key(field, ProtobufWireType::Length);
        self.raw_varint(bytes as u64);
    }

    /// Starts a message whose length is not known yet.
    #[inline]
    pub(super) fn begin(&mut self, field: u32) -> OpenProtobufMessage {
        self.key(field, ProtobufWireType::Length);
        self.out.extend_from_slice(&[0, 0]);
        OpenProtobufMessage { start: self.out.len() }
    }

    /// Ends a message. Its length takes two bytes even if one is enough, which the format allows: so no bytes have to be moved, unless the
    /// message is longer than 16 KiB.
    pub(super) fn finish(&mut self, OpenProtobufMessage { start }: OpenProtobufMessage) {
        let length = self.out.len() - start;
        let prefix = start - 2..start;
        if length <= TWO_BYTES {
            self.out[prefix].copy_from_slice(&[length as u8 | 0x80, (length >> 7) as u8]);
        } else {
            let mut digits = Self::default();
            digits.raw_varint(length as u64);
            self.out.splice(prefix, digits.out);
        }
    }
}

/// Encoded size of a `string`, `bytes` or message field of this length, for field numbers below 16.
pub(super) const fn size_of_bytes(length: usize) -> usize {
    1 + size_of_varint(length as u64) + length
}

/// Encoded size of a varint.
pub(super) const fn size_of_varint(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}
