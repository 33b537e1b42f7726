//! Whole days.
