//! What every long-running command shares: supervised tasks, signals, drain, listeners, configuration.
