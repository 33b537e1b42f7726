//! A slab in chunks: growth copies nothing.

use std::marker::PhantomData;

use crate::indices::SlabIndex;

/// Size of a chunk, of which the allocator wastes little.
pub(crate) const CHUNK_BYTES: usize = 12 << 10;

/// A growing list whose slots are reused. A free slot contains the type's default.
#[derive(Debug)]
pub(crate) struct Slab<I, T> {
    chunks: Vec<Vec<T>>,
    free: Vec<u32>,
    len: usize,
    index: PhantomData<I>,
}

impl<I, T> Default for Slab<I, T> {
    fn default() -> Self {
        Self { chunks: Vec::new(), free: Vec::new(), len: 0, index: PhantomData }
    }
}

impl<I, T> Slab<I, T> {
    /// Number of values per chunk.
    const CHUNK: usize = CHUNK_BYTES / size_of::<T>();
}

impl<I: SlabIndex, T: Default> Slab<I, T> {
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Whether an index has been used since the slab was last empty.
    pub(crate) fn contains(&self, index: I) -> bool {
        index.slot() < self.high_water_mark()
    }

    /// Number of slots used since the slab was last empty.
    pub(crate) fn high_water_mark(&self) -> u32 {
        match self.chunks.last() {
            Some(last) => ((self.chunks.len() - 1) * Self::CHUNK + last.len()) as u32,
            None => 0,
        }
    }

    /// Inserts a value into a free slot. Indices cannot overflow: four billion entries exceed a master's memory.
    pub(crate) fn insert(&mut self, value: T) -> I {
        self.len += 1;
        if let Some(slot) = self.free.pop() {
            let index = I::from_slot(slot);
            self[index] = value;
            return index;
        }
        let index = I::from_slot(self.high_water_mark());
        match self.chunks.last_mut() {
            Some(last) if last.len() < Self::CHUNK => last.push(value),
            _ => {
                let mut chunk = Vec::with_capacity(Self::CHUNK);
                chunk.push(value);
                self.chunks.push(chunk);
            }
        }
        index
    }

    /// Removes a value. When the slab becomes empty, its memory is freed.
    pub(crate) fn remove(&mut self, index: I) -> T {
        let value = std::mem::take(&mut self[index]);
        self.len -= 1;
        if self.len == 0 {
            *self = Self::default();
        } else {
            self.free.push(index.slot());
        }
        value
    }
}

impl<I: SlabIndex, T> std::ops::Index<I> for Slab<I, T> {
    type Output = T;

    fn index(&self, index: I) -> &T {
        let slot = index.slot() as usize;
        &self.chunks[slot / Self::CHUNK][slot % Self::CHUNK]
    }
}

impl<I: SlabIndex, T> std::ops::IndexMut<I> for Slab<I, T> {
    fn index_mut(&mut self, index: I) -> &mut T {
        let slot = index.slot() as usize;
        &mut self.chunks[slot / Self::CHUNK][slot % Self::CHUNK]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::indices::EntryIndex;

    #[test]
    fn slots_are_reused_and_an_empty_slab_frees_memory() {
        let mut slab = Slab::<EntryIndex, u64>::default();
        let indices: Vec<EntryIndex> = (0..5000_u64).map(|value| slab.insert(value + 1)).collect();
        assert_eq!(indices, (0..5000).map(EntryIndex::from_slot).collect::<Vec<_>>());
        let removed = EntryIndex::from_slot(300);
        assert_eq!(slab.remove(removed), 301);
        assert_eq!(
            (slab.insert(7), slab[removed], slab.high_water_mark(), slab.len()),
            (removed, 7, 5000, 5000)
        );
        for index in indices {
            slab.remove(index);
        }
        assert_eq!((slab.len(), slab.high_water_mark(), slab.chunks.capacity()), (0, 0, 0));
    }
}
