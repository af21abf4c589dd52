"""`diptych bench`: fixed workloads against any OpenAI-compatible server, measured from outside."""
