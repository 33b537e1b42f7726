//! RoleBasedGroup's labels, environment names and injected discovery file.
