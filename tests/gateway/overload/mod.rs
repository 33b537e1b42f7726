//! Too many requests, too large ones, and engines that are out: refusals are typed, say when to come back, and leave the rest alone.

mod engine_outage;
mod engine_refusals;
mod open_files;
mod request_memory;
