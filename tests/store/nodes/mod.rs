//! Store nodes together with Mooncake's client, master and store nodes, and with Moongate's own client and master.

mod disk;
mod drain;
mod masters;
mod node;
mod older_releases;
mod persistence;
mod removal;
mod rest;
mod tasks;
