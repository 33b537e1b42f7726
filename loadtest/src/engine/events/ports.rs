//! Sockets on consecutive ports: rank `r` listens on the first port plus `r`, as routers of both engines expect.

use std::net::SocketAddr;
use std::ops::Range;

use moongate_zmtp::{ZmtpEndpoint, ZmtpOptions, ZmtpPublisher, ZmtpPublisherServer, ZmtpResponder};

use super::KvEventOptions;
use crate::engine::config::SimEngineError;

/// Maximum attempts to find consecutive free ports.
const ATTEMPTS: u32 = 64;

/// Ports that are tried for several ranks: below those that Linux gives to connections by default, since among those of a busy machine
/// hardly any are free in a row.
const CONSECUTIVE_PORTS: Range<u16> = 16_384..32_000;

/// First ports of an engine's event sockets; rank `r` uses the first port plus `r`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvEventPorts {
    pub(crate) live: SocketAddr,
    pub(crate) replay: SocketAddr,
}

impl KvEventPorts {
    pub(crate) fn live(&self, rank: u32) -> SocketAddr {
        offset(self.live, rank).unwrap_or(self.live)
    }

    pub(crate) fn replay(&self, rank: u32) -> SocketAddr {
        offset(self.replay, rank).unwrap_or(self.replay)
    }
}

#[derive(Debug)]
pub(crate) struct KvEventSockets {
    pub(super) publisher: ZmtpPublisher,
    pub(super) server: ZmtpPublisherServer,
    pub(super) responder: ZmtpResponder,
}

impl KvEventSockets {
    pub(super) async fn open(live: SocketAddr, replay: SocketAddr) -> Result<Self, moongate_zmtp::ZmtpError> {
        let (publisher, server) =
            ZmtpPublisher::bind(&ZmtpEndpoint::from(live), ZmtpOptions::default()).await?;
        let responder = ZmtpResponder::bind(&ZmtpEndpoint::from(replay), ZmtpOptions::default()).await?;
        Ok(Self { publisher, server, responder })
    }

    /// Opens the sockets of all ranks.
    pub(crate) async fn open_all(
        settings: &KvEventOptions,
        ranks: u32,
    ) -> Result<(KvEventPorts, Vec<Self>), SimEngineError> {
        let fail = |source| SimEngineError::Events { address: settings.listen, source };
        let mut attempt = 1;
        loop {
            match Self::try_all(settings.listen, ranks).await {
                Ok(opened) => return Ok(opened),
                Err(_) if settings.listen.port() == 0 && attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(fail(error)),
            }
        }
    }

    async fn try_all(
        first: SocketAddr,
        ranks: u32,
    ) -> Result<(KvEventPorts, Vec<Self>), moongate_zmtp::ZmtpError> {
        let free = |at: SocketAddr| match at.port() {
            0 if ranks > 1 => SocketAddr::new(at.ip(), fastrand::u16(CONSECUTIVE_PORTS)),
            _ => at,
        };
        let (publisher, server) =
            ZmtpPublisher::bind(&ZmtpEndpoint::from(free(first)), ZmtpOptions::default()).await?;
        let live = server.local_addr();
        let replay_at = if first.port() == 0 { Some(free(first)) } else { offset(live, ranks) };
        let responder =
            ZmtpResponder::bind(&ZmtpEndpoint::from(in_range(replay_at)?), ZmtpOptions::default()).await?;
        let replay = responder.local_addr();
        let mut all = vec![Self { publisher, server, responder }];
        for rank in 1..ranks {
            all.push(Self::open(in_range(offset(live, rank))?, in_range(offset(replay, rank))?).await?);
        }
        Ok((KvEventPorts { live, replay }, all))
    }
}

fn offset(address: SocketAddr, by: u32) -> Option<SocketAddr> {
    let port = u16::try_from(u32::from(address.port()) + by).ok()?;
    Some(SocketAddr::new(address.ip(), port))
}

fn in_range(address: Option<SocketAddr>) -> Result<SocketAddr, moongate_zmtp::ZmtpError> {
    address.ok_or_else(|| {
        std::io::Error::new(std::io::ErrorKind::AddrNotAvailable, "a rank would need a port above 65535")
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn ranks_have_neighbouring_ports() {
        let (ports, sockets) = KvEventSockets::open_all(&KvEventOptions::default(), 3).await.unwrap();
        for (rank, sockets) in (0..).zip(&sockets) {
            assert_eq!(sockets.server.local_addr(), ports.live(rank));
            assert_eq!(sockets.responder.local_addr(), ports.replay(rank));
        }
        assert_eq!(ports.live(2).port(), ports.live.port() + 2);
        let occupied = KvEventOptions { listen: ports.live, ..KvEventOptions::default() };
        assert!(matches!(KvEventSockets::open_all(&occupied, 1).await, Err(SimEngineError::Events { .. })));
    }

    #[test]
    fn port_range_is_bounded() {
        assert_eq!(offset("127.0.0.1:65535".parse().unwrap(), 1), None);
    }
}
