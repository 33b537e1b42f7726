//! Checks which shard of its store a master is, as the first exchange on a connection.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use mooncake_wire::frame::{self, FrameParseResult, ResponseHeader, RpcFault, RpcFrame};
use mooncake_wire::shards::{ShardIdentity, ShardRequest, decode_identity};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::error::{ConnectionLossError, MasterConnectError, RpcError};
use super::transport::RpcTransport;

/// Maximum size of the response in bytes.
const MAX_RESPONSE: usize = 4096;

/// # Errors
/// [`RpcError::OtherShard`], or that there is no valid response within `limit`.
pub(super) async fn check(
    transport: &mut RpcTransport,
    address: &Arc<str>,
    expected: ShardIdentity,
    limit: Duration,
) -> Result<(), RpcError> {
    let exchanged = async {
        match transport {
            RpcTransport::Plain(stream) => exchange(stream).await,
            RpcTransport::Secured(stream, _) => exchange(&mut **stream).await,
        }
    };
    let Ok(response) = tokio::time::timeout(limit, exchanged).await else {
        return Err(RpcError::Unreachable {
            address: Arc::clone(address),
            source: MasterConnectError::TimedOut(limit),
        });
    };
    let response = response.map_err(|error| RpcError::Lost {
        address: Arc::clone(address),
        source: ConnectionLossError::Io(Arc::new(error)),
    })?;
    let actual = match u16::from(response.header.error) {
        0 => {
            let decoded = decode_identity(&response.body)
                .map_err(|error| RpcError::Protocol { address: Arc::clone(address), source: error.into() })?;
            Some(decoded?)
        }
        RpcFault::NOT_REGISTERED => None,
        _ => {
            return Err(RpcFault::parse(response.header.error, &response.body).map_or_else(
                |error| RpcError::Protocol { address: Arc::clone(address), source: error.into() },
                RpcError::Fault,
            ));
        }
    };
    if actual == Some(expected) {
        return Ok(());
    }
    Err(RpcError::OtherShard { address: Arc::clone(address), expected, actual })
}

async fn exchange(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<RpcFrame<ResponseHeader, Bytes>> {
    let mut buffer = BytesMut::new();
    ShardRequest::Identity.encode(0, &mut buffer).map_err(io::Error::other)?;
    stream.write_all(&buffer).await?;
    stream.flush().await?;
    buffer.clear();
    loop {
        if stream.read_buf(&mut buffer).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let parsed = frame::take::<ResponseHeader>(&mut buffer, MAX_RESPONSE);
        if let FrameParseResult::Frame(response) = parsed.map_err(io::Error::other)? {
            return Ok(response);
        }
    }
}
