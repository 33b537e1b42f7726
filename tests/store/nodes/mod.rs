//! Store nodes beside the real things: Mooncake's client, its master, its store nodes; and our own client and master.

mod disk;
mod drain;
mod masters;
mod node;
mod older_releases;
mod persistence;
mod rest;
mod tasks;
