//! Engine simulator, load generator and trace replay.
