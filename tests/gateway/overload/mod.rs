//! Too many requests, too large ones, and engines that are out: refusals are typed, contain the time of a retry, and do not affect other
//! requests.

mod engine_outage;
mod engine_refusals;
mod open_files;
mod request_memory;
