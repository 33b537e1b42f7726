//! One end of a reliable connection, with the parameters that Mooncake uses.
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

/// Maximum number of work requests in flight per queue pair.
pub(crate) const DEPTH: u32 = 256;
const ELEMENTS: u32 = 4;
/// Hop limit: maximum number of routers on the path.
const HOPS: u8 = 16;
/// Maximum number of RDMA reads in flight between two devices.
const READS: u8 = 16;
/// Retransmission timeout: 4.096 µs × 2^14 = 67 ms.
const TIMEOUT: u8 = 14;
/// Retry count. 7 is the maximum; for a receiver that is not ready it means unlimited.
const RETRIES: u8 = 7;
/// Receiver-not-ready delay: 0.64 ms.
const NOT_READY: u8 = 12;

/// A queue pair, destroyed on drop; it produces no completions afterwards.
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
        let mut attributes = sys::ibv_qp_init_attr {
            send_cq: context.queue(),
            recv_cq: context.queue(),
            cap: sys::ibv_qp_cap {
                max_send_wr: DEPTH,
                // All transfers are one-sided: nothing is received.
                max_recv_wr: 1,
                max_send_sge: ELEMENTS,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: sys::ibv_qp_type::IBV_QPT_RC,
            ..sys::ibv_qp_init_attr::default()
        };
        // SAFETY: domain and queue belong to one device and outlive the queue pair.
        let handle = unsafe {
            let pair = sys::ibv_create_qp(context.domain.pointer(), &raw mut attributes);
            VerbsHandle::new(pair, sys::ibv_destroy_qp, "queue pair")?
        };
        Ok(Self { handle, context: Arc::clone(context) })
    }

    /// The queue pair number that the peer connects to.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair exists as long as `self`, and its number does not change.
        unsafe { (*self.handle.pointer()).qp_num }
    }

    /// Connects to queue pair `number` at the remote port.
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

    /// Moves to the error state; each work request in flight completes with an error.
    pub(crate) fn fail(&self) -> io::Result<()> {
        let failed =
            sys::ibv_qp_attr { qp_state: sys::ibv_qp_state::IBV_QPS_ERR, ..sys::ibv_qp_attr::default() };
        self.modify(failed, &[], "ERR")
    }

    fn modify(
        &self,
        mut attributes: sys::ibv_qp_attr,
        fields: &[sys::ibv_qp_attr_mask],
        state: &str,
    ) -> io::Result<()> {
        let mask = fields.iter().fold(sys::ibv_qp_attr_mask::IBV_QP_STATE.0, |mask, field| mask | field.0);
        let mask = i32::try_from(mask).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: the queue pair exists, and all attributes in the mask are set.
        checked(unsafe { sys::ibv_modify_qp(self.handle.pointer(), &raw mut attributes, mask) }).map_err(
            |error| io::Error::new(error.kind(), format!("cannot move queue pair to state {state}: {error}")),
        )
    }

    /// Posts a read or write. The caller keeps the memory registered until the completion, or until the queue pair is dropped.
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
        // SAFETY: the queue pair exists, its device is open, and the function table does not change.
        let post = unsafe { (*(*pair).context).ops.post_send }.ok_or(io::ErrorKind::Unsupported)?;
        let mut bad_request = ptr::null_mut();
        // SAFETY: request and element are read before the function returns. The element's memory lies in a region registered with this
        // device: the device rejects other keys. Later writes by the device are sound, since a region hands out no references.
        checked(unsafe { post(pair, &raw mut request, &raw mut bad_request) })
    }
}
