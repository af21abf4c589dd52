"""Bodies that travel between services. Unknown fields are ignored: a newer service can talk to an older one."""
