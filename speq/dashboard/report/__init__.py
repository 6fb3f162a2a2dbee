"""Pages of what benches and recorded runs wrote: each bench declares its pictures."""
