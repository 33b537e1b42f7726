//! The queue of a group: Kueue admits its pods when the queue has quota, or Volcano schedules them from it.
//!
//! The queue is in no revision. The set of a role and its instances have it as an annotation, and pods get it at creation: neither
//! scheduler accepts another queue for a pod that it has admitted.

use rbg_api::v1alpha2::{RoleBasedGroup, RoleInstance};
use rbg_api::{PodTemplate, keys};

use crate::error::RenderError;
use crate::group::{GangScheduler, GroupContext};
use crate::manifest::{Manifest, StringMap};
use crate::names::{MAX_NAME, truncate_with_hash};

/// The queue of a group, if it has one.
///
/// # Errors
/// [`RenderError::Queue`] if it is not a name.
pub fn queue(group: &RoleBasedGroup) -> Result<Option<&str>, RenderError> {
    let annotations = group.metadata.annotations.as_ref();
    let Some(queue) = annotations.and_then(|all| all.get(keys::QUEUE)).filter(|queue| !queue.is_empty())
    else {
        return Ok(None);
    };
    let is_end = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let has_ends = [queue.bytes().next(), queue.bytes().next_back()].into_iter().flatten().all(is_end);
    let is_name = queue.bytes().all(|byte| is_end(byte) || matches!(byte, b'-' | b'.'));
    if has_ends && is_name && queue.len() <= MAX_NAME {
        Ok(Some(queue))
    } else {
        Err(RenderError::Queue(queue.clone()))
    }
}

impl<'a> GroupContext<'a> {
    /// The group's queue, if it has one.
    pub(crate) fn queue(self) -> Result<Option<&'a str>, RenderError> {
        queue(self.object)
    }

    /// Key of the queue, for the scheduler that handles gangs. The PodGroups of scheduler-plugins have no queues, so that Kueue does.
    pub(crate) fn queue_key(self) -> &'static str {
        match self.gang_scheduler {
            GangScheduler::SchedulerPlugins => keys::KUEUE_QUEUE,
            GangScheduler::Volcano => keys::VOLCANO_QUEUE,
        }
    }
}

/// Adds the queue of an instance to one of its pods.
pub(crate) fn add_to_pod(instance: &RoleInstance, template: &mut PodTemplate) {
    let annotation = |key: &str| {
        let value = instance.metadata.annotations.as_ref()?.get(key).filter(|queue| !queue.is_empty())?;
        Some(StringMap::from([(key.to_owned(), value.clone())]))
    };
    if let Some(label) = annotation(keys::KUEUE_QUEUE) {
        template.set_labels(&label);
    }
    if let Some(queue) = annotation(keys::VOLCANO_QUEUE) {
        template.set_annotations(&queue);
    }
}

/// Name of a new group of the instance's pods that Kueue admits together. Each has another name, since a group that has ended stays so.
#[must_use]
pub fn kueue_group_name(instance: &str, now_seconds: i64) -> String {
    truncate_with_hash(&format!("{instance}-{now_seconds}"))
}

/// Makes a pod a member of a group of pods that Kueue admits together. Kueue keeps an ended pod until another one replaces it, which has to
/// have another name; with `retriable-in-group: false` it releases the pods when all of the group have ended.
pub fn join_kueue_group(pod: &mut Manifest, group: &str, size: i32) {
    let metadata = &mut pod.0["metadata"];
    metadata["labels"][keys::KUEUE_POD_GROUP] = group.into();
    metadata["annotations"][keys::KUEUE_POD_GROUP_SIZE] = size.to_string().into();
    metadata["annotations"][keys::KUEUE_RETRIABLE] = "false".into();
}
