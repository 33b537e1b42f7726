//! Events that wait to be published.

use std::collections::VecDeque;
use std::sync::Arc;

use mooncake_wire::events::Medium;
use mooncake_wire::events::mooncake::{DEFAULT_TENANT, SegmentChange};
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum News {
    /// An object can be read from a medium.
    Stored(Name),
    /// An object has left a medium.
    Removed(Name),
    /// A segment is there, or not.
    Segment(Arc<str>, SegmentChange),
}

/// A key, whose it is, its group, and on which medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Name {
    /// None for the default tenant.
    tenant: Option<Box<str>>,
    pub(super) key: Box<str>,
    pub(super) group: Option<Box<str>>,
    pub(super) medium: Medium<'static>,
}

impl Name {
    fn new(tenant: &str, key: &str, group: Option<&str>, medium: Medium<'static>) -> Self {
        let tenant = (tenant != DEFAULT_TENANT).then(|| tenant.into());
        Self { tenant, key: key.into(), group: group.map(Into::into), medium }
    }

    pub(super) fn tenant(&self) -> &str {
        self.tenant.as_deref().unwrap_or(DEFAULT_TENANT)
    }
}

/// Events in the order in which they came, with their numbers.
#[derive(Debug)]
pub struct Queue {
    state: Mutex<State>,
    more: Notify,
    capacity: usize,
}

#[derive(Debug)]
struct State {
    waiting: VecDeque<News>,
    /// The number of the last event that came.
    last: u64,
    dropped: u64,
    /// Whether events were dropped since the last were taken.
    gap: bool,
}

/// Events that were taken together.
#[derive(Debug, Default)]
pub(super) struct Taken {
    /// The number of the first.
    pub(super) first: u64,
    pub(super) news: Vec<News>,
    /// Whether some before them were dropped.
    pub(super) gap: bool,
}

impl Queue {
    /// A queue of at most `capacity` events; when there are more, the oldest are dropped.
    pub fn new(capacity: usize) -> Self {
        let state = State { waiting: VecDeque::new(), last: 0, dropped: 0, gap: false };
        Self { state: Mutex::new(state), more: Notify::new(), capacity: capacity.max(1) }
    }

    /// The first event has the number after this one. Only while there is none.
    pub(crate) fn begin_after(&self, number: u64) {
        let mut state = self.state.lock();
        if state.waiting.is_empty() {
            state.last = state.last.max(number);
        }
    }

    pub(crate) fn stored(&self, tenant: &str, key: &str, group: Option<&str>, medium: Medium<'static>) {
        self.add(News::Stored(Name::new(tenant, key, group, medium)));
    }

    pub(crate) fn removed(&self, tenant: &str, key: &str, group: Option<&str>, medium: Medium<'static>) {
        self.add(News::Removed(Name::new(tenant, key, group, medium)));
    }

    pub(crate) fn segment(&self, name: Arc<str>, change: SegmentChange) {
        self.add(News::Segment(name, change));
    }

    fn add(&self, news: News) {
        let mut state = self.state.lock();
        state.last += 1;
        if state.waiting.len() >= self.capacity {
            state.waiting.pop_front();
            state.dropped += 1;
            state.gap = true;
        }
        state.waiting.push_back(news);
        let is_first = state.waiting.len() == 1;
        drop(state);
        if is_first {
            self.more.notify_one();
        }
    }

    /// The number of the last event that came.
    pub(crate) fn last(&self) -> u64 {
        self.state.lock().last
    }

    /// Events that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.state.lock().dropped
    }

    /// Tells of objects that have been stored, or removed, after an event.
    #[cfg(test)]
    pub(crate) fn replay_after(&self, event: u64, mut each: impl FnMut(bool, &str)) {
        let state = self.state.lock();
        let first = state.last + 1 - state.waiting.len() as u64;
        for (_, news) in (first..).zip(&state.waiting).filter(|(id, _)| *id > event) {
            match news {
                News::Stored(name) => each(true, &name.key),
                News::Removed(name) => each(false, &name.key),
                News::Segment(..) => {}
            }
        }
    }

    /// Takes the first events, at least one and at most `limit`: either of objects, or of segments.
    pub(super) async fn take(&self, limit: usize) -> Taken {
        loop {
            let taken = self.state.lock().take(limit);
            if !taken.news.is_empty() {
                return taken;
            }
            self.more.notified().await;
        }
    }
}

impl State {
    fn take(&mut self, limit: usize) -> Taken {
        let is_segment = |it: &News| matches!(it, News::Segment(..));
        let kind = self.waiting.front().is_some_and(is_segment);
        let same = self.waiting.iter().take(limit).take_while(|it| is_segment(it) == kind).count();
        let first = self.last + 1 - self.waiting.len() as u64;
        let news: Vec<News> = self.waiting.drain(..same).collect();
        let gap = !news.is_empty() && std::mem::take(&mut self.gap);
        Taken { first, news, gap }
    }
}
