//! Transfers over an RDMA device of this machine. `tests/rdma/run` starts a virtual machine with one.
#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod connection;
mod device;
