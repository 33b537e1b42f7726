//! Copies bytes between a data-plane socket and a memory region.

#[cfg(not(feature = "simulation"))]
mod system {
    use std::io;

    use moongate_memory::MappedRegion;
    use moongate_transfer::serve::DataSocket;

    pub(crate) fn receive(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        region.receive_exact(socket, offset, len)
    }

    pub(crate) fn receive_summed(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<u32> {
        region.receive_exact_crc(socket, offset, len)
    }

    pub(crate) fn send(region: &MappedRegion, socket: &DataSocket, offset: u64, len: u64) -> io::Result<()> {
        region.send_all(socket, offset, len)
    }

    pub(crate) fn send_summed(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<u32> {
        region.send_all_crc(socket, offset, len)
    }
}

#[cfg(feature = "simulation")]
mod simulated {
    use std::io;

    use moongate_memory::MappedRegion;
    use moongate_transfer::serve::DataSocket;

    pub(crate) fn receive(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<()> {
        let bytes = socket.received();
        region.write_at(offset, &bytes).map_err(io::Error::other)?;
        if bytes.len() as u64 == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    pub(crate) fn receive_summed(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<u32> {
        receive(region, socket, offset, len)?;
        region.crc32c(offset, len).map_err(io::Error::other)
    }

    pub(crate) fn send(region: &MappedRegion, socket: &DataSocket, offset: u64, len: u64) -> io::Result<()> {
        region.check(offset, len).map_err(io::Error::other)?;
        let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
        region.read_at(offset, &mut bytes).map_err(io::Error::other)?;
        socket.send(&bytes);
        Ok(())
    }

    pub(crate) fn send_summed(
        region: &MappedRegion,
        socket: &DataSocket,
        offset: u64,
        len: u64,
    ) -> io::Result<u32> {
        let crc = region.crc32c(offset, len).map_err(io::Error::other)?;
        send(region, socket, offset, len)?;
        Ok(crc)
    }
}

#[cfg(feature = "simulation")]
pub(crate) use simulated::{receive, receive_summed, send, send_summed};
#[cfg(not(feature = "simulation"))]
pub(crate) use system::{receive, receive_summed, send, send_summed};
