"""Will a checkpoint load on this machine, and if not, what to type. Start with ``diagnose``."""
