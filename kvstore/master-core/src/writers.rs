//! The clients that wrote a shard's objects, each stored once.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use mooncake_wire::types::Uuid;

/// Writer in the table of its shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WriterIndex(u16);

impl WriterIndex {
    /// The index of a writer that the table has no slot for.
    pub(crate) const UNLISTED: Self = Self(u16::MAX);
}

impl Default for WriterIndex {
    fn default() -> Self {
        Self::UNLISTED
    }
}

#[derive(Clone, Copy, Debug)]
struct Writer {
    client: Uuid,
    objects: u32,
}

/// The writers of a shard, with the number of their objects.
#[derive(Debug, Default)]
pub(crate) struct WriterTable {
    writers: Vec<Writer>,
    free: Vec<u16>,
    by_client: HashMap<Uuid, u16, FixedState>,
}

impl WriterTable {
    /// Adds an object of a client. `UNLISTED` if 65 535 others have objects.
    pub(crate) fn add(&mut self, client: Uuid) -> WriterIndex {
        if let Some(index) = self.by_client.get(&client) {
            self.writers[usize::from(*index)].objects += 1;
            return WriterIndex(*index);
        }
        let writer = Writer { client, objects: 1 };
        let index = if let Some(index) = self.free.pop() {
            self.writers[usize::from(index)] = writer;
            index
        } else {
            match u16::try_from(self.writers.len()) {
                Ok(index) if index < u16::MAX => {
                    self.writers.push(writer);
                    index
                }
                _ => return WriterIndex::UNLISTED,
            }
        };
        self.by_client.insert(client, index);
        WriterIndex(index)
    }

    /// Removes an object of a writer.
    pub(crate) fn remove(&mut self, index: WriterIndex) {
        let Some(writer) = self.writers.get_mut(usize::from(index.0)) else { return };
        writer.objects -= 1;
        if writer.objects == 0 {
            self.by_client.remove(&writer.client);
            self.free.push(index.0);
            if self.by_client.is_empty() {
                *self = Self::default();
            }
        }
    }

    pub(crate) fn get(&self, index: WriterIndex) -> Option<Uuid> {
        self.writers.get(usize::from(index.0)).map(|writer| writer.client)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writers_are_listed_while_they_have_objects() {
        let (mut table, client) = (WriterTable::default(), |first| Uuid { first, second: 1 });
        let first = table.add(client(0));
        assert_eq!((table.add(client(0)), table.get(first)), (first, Some(client(0))));
        let others: Vec<WriterIndex> =
            (1..u64::from(u16::MAX)).map(|number| table.add(client(number))).collect();
        let unlisted = table.add(client(u64::MAX));
        assert_eq!((unlisted, table.get(unlisted)), (WriterIndex::UNLISTED, None));
        table.remove(unlisted);
        table.remove(first);
        assert_eq!(table.get(first), Some(client(0)));
        table.remove(others[0]);
        let reused = table.add(client(u64::MAX));
        assert_eq!((reused, table.get(reused)), (others[0], Some(client(u64::MAX))));
        others[1..].iter().chain([&first, &reused]).for_each(|index| table.remove(*index));
        assert!(table.writers.is_empty());
    }
}
