"""Pictures of what benches found: one file a kind of bench, each from rows to panels."""
