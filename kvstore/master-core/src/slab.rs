//! Values in numbered places, in chunks: growth neither copies nor doubles, and a place is found with one division.

/// No place.
pub(crate) const NIL: u32 = u32::MAX;
/// Values per chunk, as a power of two.
const CHUNK_BITS: u32 = 8;
const CHUNK: usize = 1 << CHUNK_BITS;

/// A growing list whose places are reused. A place that is free holds the type's default.
#[derive(Debug, Default)]
pub(crate) struct Slab<T> {
    chunks: Vec<Vec<T>>,
    free: Vec<u32>,
    len: usize,
}

impl<T: Default> Slab<T> {
    /// Values that are there.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// One more than the highest place ever used since the slab was last empty.
    pub(crate) fn high_water_mark(&self) -> u32 {
        match self.chunks.last() {
            Some(last) => ((self.chunks.len() - 1) << CHUNK_BITS) as u32 + last.len() as u32,
            None => 0,
        }
    }

    /// Puts a value into a free place. Four billion places would take more memory than a master has.
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        self.len += 1;
        if let Some(at) = self.free.pop() {
            self[at] = value;
            return at;
        }
        let at = self.high_water_mark();
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK => last.push(value),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(value);
                self.chunks.push(chunk);
            }
        }
        at
    }

    /// Takes a value out. When none is left, the memory goes back.
    pub(crate) fn remove(&mut self, at: u32) -> T {
        let value = std::mem::take(&mut self[at]);
        self.len -= 1;
        if self.len == 0 {
            *self = Self { chunks: Vec::new(), free: Vec::new(), len: 0 };
        } else {
            self.free.push(at);
        }
        value
    }
}

impl<T> std::ops::Index<u32> for Slab<T> {
    type Output = T;

    fn index(&self, at: u32) -> &T {
        &self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }
}

impl<T> std::ops::IndexMut<u32> for Slab<T> {
    fn index_mut(&mut self, at: u32) -> &mut T {
        &mut self.chunks[(at >> CHUNK_BITS) as usize][at as usize & (CHUNK - 1)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_reused_and_memory_goes_back() {
        let mut slab = Slab::default();
        let places: Vec<u32> = (0..1000_u64).map(|value| slab.insert(value + 1)).collect();
        assert_eq!(places, (0..1000).collect::<Vec<_>>());
        assert_eq!(slab.remove(300), 301);
        assert_eq!((slab.insert(7), slab[300], slab.high_water_mark(), slab.len()), (300, 7, 1000, 1000));
        for at in 0..1000 {
            slab.remove(at);
        }
        assert_eq!((slab.len(), slab.high_water_mark(), slab.chunks.capacity()), (0, 0, 0));
    }
}
