"""The real `decide` outside a supervisor: a journal decided again, scenarios from files, and months in seconds."""
