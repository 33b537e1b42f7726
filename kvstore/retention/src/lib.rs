//! Which blocks a store keeps. Learns online after which times blocks are used again, and computes the value of keeping
//! a block from its class and from the time since its last use. Pure: the caller supplies times and key hashes.
//!
//! The value is the Gittins index of the block's return: the largest ratio, over all durations, of the probability that
//! the block returns within the duration to the expected time for which it occupies space until then. Evicting the
//! smallest value first maximizes the hits per byte and second.
//!
//! | part | subject |
//! |---|---|
//! | `prompt_description` | what is known about the prompt that uses a block |
//! | `block_class` | what is known of a block when it is used |
//! | `age_bins` | logarithmic bins of times |
//! | `sampled_blocks` | a bounded sample of all blocks, whether they are stored or not |
//! | `return_times` | counts of returns per class and age |
//! | `learned_counts` | these counts as bytes, for restarts |
//! | `retention_values` | values by class and age |
//! | `class_queues` | stored blocks in the order of eviction |
//! | `trial` | whether the values beat LRU |

mod age_bins;
mod block_class;
mod class_queues;
mod learned_counts;
mod prompt_description;
mod retention_values;
mod return_times;
mod sampled_blocks;
mod trial;

pub use self::block_class::BlockClass;
pub use self::class_queues::ClassQueues;
pub use self::learned_counts::LearnedCountsError;
pub use self::prompt_description::{PromptDescription, PromptLength, ReturnHint, TenantBucket};
pub use self::retention_values::RetentionValues;
pub use self::return_times::ReturnTimeLearner;
pub use self::trial::TrialHits;
