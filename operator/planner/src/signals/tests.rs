//! Tests of the conversion from metrics to signals.
