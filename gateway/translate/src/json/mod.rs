//! JSON whose members keep their order and their bytes.

mod balance;
mod object;
mod python;

pub(crate) use balance::JsonBalance;
pub(crate) use object::{JsonObject, Members, array, text};
pub(crate) use python::dumps;
