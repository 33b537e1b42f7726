//! The wire format of protocol buffers, as far as it is written here: <https://protobuf.dev/programming-guides/encoding/>.

/// Most that has a length of one byte, and of two.
const ONE_BYTE: usize = 0x7f;
const TWO_BYTES: usize = 0x3fff;

/// Wire types.
#[derive(Clone, Copy)]
enum ProtobufWireType {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
    Fixed32 = 5,
}

/// Writes fields one after another. Those that are not written have their default.
#[derive(Debug, Default)]
pub(super) struct ProtobufWriter {
    out: Vec<u8>,
}

/// A message that is being written.
#[must_use]
pub(super) struct OpenProtobufMessage {
    /// Where it starts, behind its length.
    start: usize,
}

impl ProtobufWriter {
    /// A writer with room for so many bytes.
    pub(super) fn with_capacity(bytes: usize) -> Self {
        Self { out: Vec::with_capacity(bytes) }
    }

    /// What was written.
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

    /// A field of type `int64`, `bool` or `enum`.
    #[inline]
    pub(super) fn varint(&mut self, field: u32, value: u64) {
        self.key(field, ProtobufWireType::Varint);
        self.raw_varint(value);
    }

    /// A field of type `fixed64` or `double`, with a number below 16.
    #[inline]
    pub(super) fn fixed64(&mut self, field: u32, value: [u8; 8]) {
        let mut all = [(field << 3 | ProtobufWireType::Fixed64 as u32) as u8; 9];
        all[1..].copy_from_slice(&value);
        self.out.extend_from_slice(&all);
    }

    /// A field of type `fixed32`.
    #[inline]
    pub(super) fn fixed32(&mut self, field: u32, value: [u8; 4]) {
        self.key(field, ProtobufWireType::Fixed32);
        self.out.extend_from_slice(&value);
    }

    /// A field of type `string` or `bytes`, or a message that is written already.
    #[inline]
    pub(super) fn bytes(&mut self, field: u32, bytes: &[u8]) {
        self.length_prefix(field, bytes.len());
        self.out.extend_from_slice(bytes);
    }

    /// Fields that are written already.
    pub(super) fn append_encoded(&mut self, fields: &[u8]) {
        self.out.extend_from_slice(fields);
    }

    /// The start of such a field, or of a message, of which so many bytes follow.
    #[inline]
    pub(super) fn length_prefix(&mut self, field: u32, bytes: usize) {
        if field < 16 && bytes <= ONE_BYTE {
            self.out.extend_from_slice(&[(field << 3 | ProtobufWireType::Length as u32) as u8, bytes as u8]);
        } else {
            self.long_length_prefix(field, bytes);
        }
    }

    /// Apart, so that there is less code where most fields are written.
    #[cold]
    #[inline(never)]
    fn long_length_prefix(&mut self, field: u32, bytes: usize) {
        self.key(field, ProtobufWireType::Length);
        self.raw_varint(bytes as u64);
    }

    /// The start of a message whose length is not known yet.
    #[inline]
    pub(super) fn begin(&mut self, field: u32) -> OpenProtobufMessage {
        self.key(field, ProtobufWireType::Length);
        self.out.extend_from_slice(&[0, 0]);
        OpenProtobufMessage { start: self.out.len() }
    }

    /// The end of a message. Its length takes two bytes even where one would do, which every reader must understand: so nothing has to be
    /// moved, unless it is very long.
    pub(super) fn finish(&mut self, OpenProtobufMessage { start: at }: OpenProtobufMessage) {
        let length = self.out.len() - at;
        let room = at - 2..at;
        if length <= TWO_BYTES {
            self.out[room].copy_from_slice(&[length as u8 | 0x80, (length >> 7) as u8]);
        } else {
            let mut digits = Self::default();
            digits.raw_varint(length as u64);
            self.out.splice(room, digits.out);
        }
    }
}

/// Bytes that a field of type `string` or `bytes` takes, or a message of that length, if its number is below 16.
pub(super) const fn size_of_bytes(length: usize) -> usize {
    1 + size_of_varint(length as u64) + length
}

/// Bytes that a number takes.
pub(super) const fn size_of_varint(value: u64) -> usize {
    let bits = 64 - (value | 1).leading_zeros() as usize;
    bits.div_ceil(7)
}
