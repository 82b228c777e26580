# Block accounting and scheduling.
