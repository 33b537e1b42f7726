//! Replies of shards, merged.

use mooncake_wire::ErrorCode;
use mooncake_wire::rpc::MasterResult;

/// A shard's reply to a call that may be refused, or why there is none.
pub(crate) type ShardReply<T> = Result<MasterResult<T>, ErrorCode>;

/// The reply of the only shard that was called.
pub(crate) fn only<T>(replies: Vec<ShardReply<T>>) -> MasterResult<T> {
    replies.into_iter().next().unwrap_or(Err(ErrorCode::INTERNAL_ERROR)).and_then(|reply| reply)
}

/// The values of all shards, or the first error: what a shard does not report must not be taken for absent.
pub(crate) fn all<T>(replies: Vec<ShardReply<T>>) -> MasterResult<Vec<T>> {
    replies.into_iter().map(|reply| reply.and_then(|reply| reply)).collect()
}

/// The values of the shards that could be called, or the first error if one of them refused, or none could be called. For calls that are
/// repeated until every shard has executed them, such as heartbeats.
pub(crate) fn reachable<T>(replies: Vec<ShardReply<T>>) -> MasterResult<Vec<T>> {
    let (mut values, mut unreachable) = (Vec::new(), None);
    for reply in replies {
        match reply.and_then(|reply| reply) {
            Ok(value) => values.push(value),
            Err(code) if code.is_no_response() => unreachable = Some(code),
            Err(code) => return Err(code),
        }
    }
    match unreachable {
        Some(code) if values.is_empty() => Err(code),
        _ => Ok(values),
    }
}

/// The values of the shards that have what was asked for, at least one. `absent` is the error of the others. Another error is returned,
/// as that shard might have it.
pub(crate) fn existing<T>(replies: Vec<ShardReply<T>>, absent: ErrorCode) -> MasterResult<Vec<T>> {
    let mut values = Vec::new();
    for reply in replies {
        match reply.and_then(|reply| reply) {
            Ok(value) => values.push(value),
            Err(code) if code == absent => {}
            Err(code) => return Err(code),
        }
    }
    if values.is_empty() { Err(absent) } else { Ok(values) }
}

/// The first value, else the first error of a shard that lacks nothing but reachability, else the first error.
pub(crate) fn any<T>(replies: Vec<ShardReply<T>>) -> MasterResult<T> {
    let mut failure = None;
    for reply in replies {
        match reply.and_then(|reply| reply) {
            Ok(value) => return Ok(value),
            Err(code) if failure.is_none() || code.is_no_response() => failure = Some(code),
            Err(_) => {}
        }
    }
    Err(failure.unwrap_or(ErrorCode::INTERNAL_ERROR))
}

/// The results of a batch in the order of its items, from the results of each shard in the order of that shard's items.
pub(crate) fn interleaved<T>(
    items: &[usize],
    replies: Vec<Result<Vec<MasterResult<T>>, ErrorCode>>,
) -> Vec<MasterResult<T>> {
    let mut replies: Vec<_> = replies.into_iter().map(|reply| reply.map(Vec::into_iter)).collect();
    let next = |call: &usize| match replies.get_mut(*call) {
        Some(Ok(results)) => results.next().unwrap_or(Err(ErrorCode::INTERNAL_ERROR)),
        Some(Err(code)) => Err(*code),
        None => Err(ErrorCode::INTERNAL_ERROR),
    };
    items.iter().map(next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ABSENT: ErrorCode = ErrorCode::SEGMENT_NOT_FOUND;
    const DOWN: ErrorCode = ErrorCode::RPC_FAIL;

    #[test]
    fn a_shard_that_cannot_be_called_is_not_taken_for_an_empty_one() {
        assert_eq!(all(vec![Ok(Ok(1)), Err(DOWN)]), Err(DOWN));
        assert_eq!(all(vec![Ok(Ok(1)), Ok(Ok(2))]), Ok(vec![1, 2]));
        assert_eq!(existing(vec![Ok(Ok(1)), Ok(Err(ABSENT))], ABSENT), Ok(vec![1]));
        assert_eq!(existing(vec![Err(DOWN), Ok(Err(ABSENT)), Ok(Ok(1))], ABSENT), Err(DOWN));
        assert_eq!(existing::<()>(vec![Ok(Err(ABSENT)); 2], ABSENT), Err(ABSENT));
    }

    #[test]
    fn heartbeats_reach_the_shards_that_run() {
        assert_eq!(reachable(vec![Ok(Ok(1)), Err(DOWN), Ok(Ok(2))]), Ok(vec![1, 2]));
        assert_eq!(reachable::<()>(vec![Err(DOWN), Err(DOWN)]), Err(DOWN));
        assert_eq!(reachable(vec![Ok(Ok(1)), Ok(Err(ABSENT)), Err(DOWN)]), Err(ABSENT));
    }

    #[test]
    fn one_shard_with_an_answer_is_enough() {
        assert_eq!(any(vec![Ok(Err(ABSENT)), Err(DOWN), Ok(Ok(3))]), Ok(3));
        // The shard that is down may have it.
        assert_eq!(any::<()>(vec![Ok(Err(ABSENT)), Err(DOWN), Ok(Err(ABSENT))]), Err(DOWN));
        assert_eq!(any::<()>(vec![Ok(Err(ABSENT)); 2]), Err(ABSENT));
    }

    #[test]
    fn results_of_a_batch_are_in_its_order() {
        let replies = vec![Ok(vec![Ok('a'), Err(ABSENT), Ok('b')]), Err(DOWN), Ok(vec![Ok('c')])];
        let expected = [Ok('c'), Ok('a'), Err(DOWN), Err(ABSENT), Ok('b'), Err(DOWN)];
        assert_eq!(interleaved(&[2, 0, 1, 0, 0, 1], replies), expected);
        // A shard with too few results.
        assert_eq!(interleaved(&[0, 0], vec![Ok(vec![Ok(1)])]), [Ok(1), Err(ErrorCode::INTERNAL_ERROR)]);
    }
}
