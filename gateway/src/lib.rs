//! HTTP in and out: ingress, prompt, dispatch, relay and feedback around the pure scheduler.
