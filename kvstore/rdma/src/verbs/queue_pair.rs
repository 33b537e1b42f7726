//! One end of a reliable connection, with the parameters of Mooncake's.
#![expect(unsafe_code, reason = "libibverbs is a C library")]

use std::io;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys as sys;

use super::context::{VerbsContext, VerbsHandle, checked};
use super::registered::RegisteredRegion;
use crate::device::RdmaDevice;
use crate::gid::Gid;
use crate::link::RdmaOperation;

/// Work requests of one queue pair that are under way at most.
pub(crate) const DEPTH: u32 = 256;
const ELEMENTS: u32 = 4;
/// Routers on the way at most.
const HOPS: u8 = 16;
/// Reads that are under way between the devices at most.
const READS: u8 = 16;
/// 4.096 µs times two to the power of this until a packet is sent again: 67 ms.
const TIMEOUT: u8 = 14;
/// How often. 7 is the most, and for a receiver that is not ready it means for ever.
const RETRIES: u8 = 7;
/// The receiver asks for a pause of 0.64 ms.
const NOT_READY: u8 = 12;

/// A queue pair. It is destroyed when dropped; then no completions of it come any more.
#[derive(Debug)]
pub(crate) struct QueuePair {
    handle: VerbsHandle<sys::ibv_qp>,
    context: Arc<VerbsContext>,
}

/// A read or write of at most 2 GiB.
#[derive(Debug)]
pub(crate) struct WorkRequest<'a> {
    pub(crate) id: u64,
    pub(crate) operation: RdmaOperation,
    pub(crate) memory: &'a RegisteredRegion,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
}

impl QueuePair {
    pub(crate) fn create(context: &Arc<VerbsContext>) -> io::Result<Self> {
        let mut wanted = sys::ibv_qp_init_attr {
            send_cq: context.queue(),
            recv_cq: context.queue(),
            cap: sys::ibv_qp_cap {
                max_send_wr: DEPTH,
                // Nothing is received: all transfers are one-sided.
                max_recv_wr: 1,
                max_send_sge: ELEMENTS,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            ..sys::ibv_qp_init_attr::default()
        };
        // SAFETY: domain and queue are of one device, and are kept longer than the queue pair.
        let handle = unsafe {
            let pair = sys::ibv_create_qp(context.domain.pointer(), &raw mut wanted);
            VerbsHandle::new(pair, sys::ibv_destroy_qp, "queue pair")?
        };
        Ok(Self { handle, context: Arc::clone(context) })
    }

    /// The number by which the other end names it.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: it exists as long as `self`, and its number does not change.
        unsafe { (*self.handle.pointer()).qp_num }
    }

    /// Connects it to the queue pair `number` at a port.
    pub(crate) fn connect(&self, device: &RdmaDevice, lid: u16, gid: Gid, number: u32) -> io::Result<()> {
        use sys::ibv_qp_attr_mask as mask;
        let access = sys::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
            | sys::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        let init = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_INIT,
            port_num: device.port,
            qp_access_flags: access,
            ..sys::ibv_qp_attr::default()
        };
        let init_mask = [mask::IBV_QP_PKEY_INDEX, mask::IBV_QP_PORT, mask::IBV_QP_ACCESS_FLAGS];
        self.modify(init, &init_mask, "INIT")?;

        let route = sys::ibv_global_route {
            dgid: sys::ibv_gid { raw: gid.0 },
            sgid_index: device.gid.index,
            hop_limit: HOPS,
            ..sys::ibv_global_route::default()
        };
        let ready_to_receive = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTR,
            path_mtu: self.context.mtu,
            dest_qp_num: number,
            max_dest_rd_atomic: READS,
            min_rnr_timer: NOT_READY,
            ah_attr: sys::ibv_ah_attr {
                grh: route,
                dlid: lid,
                is_global: 1,
                port_num: device.port,
                ..sys::ibv_ah_attr::default()
            },
            ..sys::ibv_qp_attr::default()
        };
        let receive_mask = [
            mask::IBV_QP_AV,
            mask::IBV_QP_PATH_MTU,
            mask::IBV_QP_DEST_QPN,
            mask::IBV_QP_RQ_PSN,
            mask::IBV_QP_MAX_DEST_RD_ATOMIC,
            mask::IBV_QP_MIN_RNR_TIMER,
        ];
        self.modify(ready_to_receive, &receive_mask, "RTR")?;

        let ready_to_send = sys::ibv_qp_attr {
            qp_state: sys::ibv_qp_state::IBV_QPS_RTS,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: READS,
            ..sys::ibv_qp_attr::default()
        };
        let send_mask = [
            mask::IBV_QP_TIMEOUT,
            mask::IBV_QP_RETRY_CNT,
            mask::IBV_QP_RNR_RETRY,
            mask::IBV_QP_SQ_PSN,
            mask::IBV_QP_MAX_QP_RD_ATOMIC,
        ];
        self.modify(ready_to_send, &send_mask, "RTS")
    }

    /// Ends all that is under way; each work request still completes, with an error.
    pub(crate) fn fail(&self) -> io::Result<()> {
        let failed =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_ERR, ..sys::ibv_qp_attr::default() };
        self.modify(failed, &[], "ERR")
    }

    fn modify(
        &self,
        mut wanted: sys::ibv_qp_attr,
        fields: &[sys::ibv_qp_attr_mask],
        state: &str,
    ) -> io::Result<()> {
        let mask = fields.iter().fold(sys::ibv_qp_attr_mask::IBV_QP_STATE.0, |mask, field| mask | field.0);
        let mask = i32::try_from(mask).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the queue pair exists, and the attributes are all there.
        checked(unsafe { sys::ibv_modify_qp(self.handle.pointer(), &raw mut wanted, mask) })
            .map_err(|error| io::Error::new(error.kind(), format!("no queue pair in state {state}: {error}")))
    }

    /// Begins a read or write. The caller keeps the memory until its completion, or until the queue pair is dropped.
    pub(crate) fn post(&self, work: &WorkRequest<'_>) -> io::Result<()> {
        let region = work.memory.region();
        region.check(work.offset, u64::from(work.len))?;
        let mut element = sys::ibv_sge {
            addr: region.base() + work.offset,
            length: work.len,
            lkey: work.memory.local_key(),
        };
        let mut request = sys::ibv_send_wr {
            wr_id: work.id,
            sg_list: &raw mut element,
            num_sge: 1,
            opcode: match work.operation {
                RdmaOperation::Read => sys::ibv_wr_opcode::IBV_WR_RDMA_READ,
                RdmaOperation::Write => sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            },
            send_flags: sys::ibv_send_flags::IBV_SEND_SIGNALED.0,
            ..sys::ibv_send_wr::default()
        };
        request.wr.rdma.remote_addr = work.remote;
        request.wr.rdma.rkey = work.remote_key;
        let pair = self.handle.pointer();
        // SAFETY: the queue pair exists, its device is open, and the table of functions does not change.
        let post = unsafe { (*(*pair).context).ops.post_send }.ok_or(io::ErrorKind::Unsupported)?;
        let mut refused = ptr::null_mut();
        // SAFETY: request and element are read before the function returns. The memory of the element lies in a region
        // that is registered with this device: the device refuses other keys. Bytes that it writes later harm nobody,
        // since a region lends no references.
        checked(unsafe { post(pair, &raw mut request, &raw mut refused) })
    }
}
