//! Return codes of Mooncake's module: 0 or a size for success, a negative error code otherwise.

use mooncake_wire::ErrorCode;
use moongate_master_client::rpc::RpcError;
use moongate_store_client::KvError;

/// A size, a count, or 0 for success; negative for an error.
pub type ReturnCode = i64;

/// An argument is invalid, or the store is not set up.
pub const INVALID_PARAMS: ReturnCode = ErrorCode::INVALID_PARAMS.0 as ReturnCode;
/// `setup` failed for another reason than its arguments.
pub(crate) const SETUP_FAILED: ReturnCode = ErrorCode::INTERNAL_ERROR.0 as ReturnCode;
/// The buffers are larger than the object that fills them.
pub(crate) const TRANSFER_FAILED: ReturnCode = ErrorCode::TRANSFER_FAIL.0 as ReturnCode;

/// The code of a failed operation on an object.
pub(crate) fn of_error(error: &KvError) -> ReturnCode {
    let code = error.code().unwrap_or(match error {
        KvError::TooSmall { .. } | KvError::TooLarge { .. } | KvError::Empty { .. } => {
            ErrorCode::INVALID_PARAMS
        }
        KvError::NoReplica { .. } => ErrorCode::INVALID_REPLICA,
        KvError::LeaseEnded { .. } => ErrorCode::LEASE_EXPIRED,
        KvError::Master { .. } => ErrorCode::RPC_FAIL,
        _ => ErrorCode::TRANSFER_FAIL,
    });
    ReturnCode::from(code.0)
}

/// The code of a failed call to the master.
pub(crate) fn of_call(error: &RpcError) -> ReturnCode {
    match error {
        RpcError::Refused(code) => ReturnCode::from(code.0),
        _ => ReturnCode::from(ErrorCode::RPC_FAIL.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_codes_of_mooncakes_module() {
        let key = || "k".to_owned();
        assert_eq!(of_error(&KvError::NotFound { key: key() }), -704);
        assert_eq!(of_error(&KvError::TooSmall { key: key(), size: 2, capacity: 1 }), -600);
        assert_eq!(of_error(&KvError::Empty { key: key() }), -600);
        assert_eq!(of_error(&KvError::NoRoom { key: key(), size: 1 }), -200);
        assert_eq!(of_call(&RpcError::Refused(ErrorCode::OBJECT_HAS_LEASE)), -706);
        assert_eq!(of_call(&RpcError::Closed), -900);
    }
}
