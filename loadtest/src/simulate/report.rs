//! The report: one HTML file without any outside reference.

use super::sweep::{Case, Standing};

/// The report of an experiment.
pub(crate) fn html(case: &Case, standings: &[Standing]) -> String {
    let _ = (case, standings);
    String::new()
}
