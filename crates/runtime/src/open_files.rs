//! The limit of open file descriptors, and how a server divides it.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Used when the system sets no limit: more than any server here opens.
const UNLIMITED: usize = 1 << 20;
/// Divisor of the share reserved for descriptors other than client and engine connections.
const RESERVED_SHARE: usize = 8;
/// Minimum reserve: standard streams, runtime, two listeners, probes and event feeds of a small fleet.
const RESERVED_MIN: usize = 64;

/// Descriptors per kind of connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DescriptorShares {
    /// Maximum number of client connections.
    pub clients: usize,
    /// Maximum number of engine connections that carry requests.
    pub upstream: usize,
    /// Maximum number of admin connections, part of the reserve.
    pub admin: usize,
}

impl DescriptorShares {
    /// Divides `limit` descriptors: a reserve, then at most `clients` and at most two thirds for clients, and the rest for engines. Most
    /// client connections are idle, and a request needs one or two engine connections.
    #[must_use]
    pub fn split(limit: usize, clients: usize) -> Self {
        let reserve = (limit / RESERVED_SHARE).max(RESERVED_MIN).min(limit / 2);
        let usable = limit - reserve;
        let clients = clients.min(usable * 2 / 3).max(1);
        Self { clients, upstream: usable.saturating_sub(clients).max(1), admin: (reserve / 4).max(1) }
    }
}

/// Number of file descriptors that this process may open.
#[must_use]
pub fn open_file_limit() -> usize {
    let current = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(current).unwrap_or(usize::MAX).min(UNLIMITED)
}

/// Raises the soft limit of open file descriptors to the hard limit: the soft one is low only for programs that use `select`, which this
/// one does not. Returns the resulting limit.
pub fn raise_open_file_limit() -> usize {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        tracing::warn!(%error, ?current, ?maximum, "cannot raise the limit of open files");
    }
    open_file_limit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_never_exceed_the_limit() {
        for limit in (2..5000).chain([20_000, 65_536, 1 << 20]) {
            for clients in [1, 100, 16_384, usize::MAX] {
                let shares = DescriptorShares::split(limit, clients);
                let used = shares.clients + shares.upstream + shares.admin;
                assert!(limit < 8 || used <= limit, "{limit} {clients}: {shares:?}");
                assert!(shares.clients <= clients && shares.upstream >= 1, "{limit} {clients}: {shares:?}");
            }
        }
    }

    #[test]
    fn a_usual_limit_allows_the_requested_connections() {
        let shares = DescriptorShares::split(1 << 20, 16_384);
        assert_eq!(shares.clients, 16_384);
        assert!(shares.upstream > 2 * 16_384);
        assert_eq!(
            DescriptorShares::split(256, 16_384),
            DescriptorShares { clients: 128, upstream: 64, admin: 16 }
        );
    }
}
