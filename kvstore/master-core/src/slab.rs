//! A slab in chunks of 256 values: growth copies nothing, and a lookup takes one shift and one mask.

/// The index that no value has.
pub(crate) const NIL: u32 = u32::MAX;
/// Binary logarithm of the values per chunk.
const CHUNK_BITS: u32 = 8;
const CHUNK: usize = 1 << CHUNK_BITS;

/// A growing list whose slots are reused. A free slot contains the type's default.
#[derive(Debug, Default)]
pub(crate) struct Slab<T> {
    chunks: Vec<Vec<T>>,
    free: Vec<u32>,
    len: usize,
}

impl<T: Default> Slab<T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// One more than the highest index used since the slab was last empty.
    pub(crate) fn high_water_mark(&self) -> u32 {
        match self.chunks.last() {
            Some(last) => ((self.chunks.len() - 1) << CHUNK_BITS) as u32 + last.len() as u32,
            None => 0,
        }
    }

    /// Inserts a value into a free slot. Indices cannot overflow: four billion entries exceed a master's memory.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if let Some(index) = self.free.pop() {
            self[index] = value;
            return index;
        }
        let index = self.high_water_mark();
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK => last.push(value),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(value);
                self.chunks.push(chunk);
            }
        }
        index
    }

    /// Removes a value. When the slab becomes empty, its memory is freed.
    pub(crate) fn remove(&mut self, index: u32) -> T {
        let value = std::mem::take(&mut self[index]);
        self.len -= 1;
        if self.len == 0 {
            *self = Self { chunks: Vec::new(), free: Vec::new(), len: 0 };
        } else {
            self.free.push(index);
        }
        value
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        &self.chunks[(index >> CHUNK_BITS) as usize][index as usize & (CHUNK - 1)]
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        &mut self.chunks[(index >> CHUNK_BITS) as usize][index as usize & (CHUNK - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_and_an_empty_slab_frees_memory() {
        let mut slab = Slab::default();
        let indices: Vec<u32> = (0..1000_u64).map(|value| slab.insert(value + 1)).collect();
        assert_eq!(indices, (0..1000).collect::<Vec<_>>());
        assert_eq!(slab.remove(300), 301);
        assert_eq!((slab.insert(7), slab[300], slab.high_water_mark(), slab.len()), (300, 7, 1000, 1000));
        for index in 0..1000 {
            slab.remove(index);
        }
        assert_eq!((slab.len(), slab.high_water_mark(), slab.chunks.capacity()), (0, 0, 0));
    }
}
