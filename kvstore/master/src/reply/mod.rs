//! Replies: encoded with the capabilities of their caller, held back until the changes behind them are durable, and sent.

mod encode;
mod grant;
mod writer;

pub(crate) use encode::{CallReply, write_fault};
pub(crate) use writer::{MAX_IDLE_BUFFER, ReplyWriteError, ReplyWriter};
