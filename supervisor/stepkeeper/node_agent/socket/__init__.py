"""The agent's socket: who may connect, what a user may ask, and how much of it.

place.py        where the socket lies, made so that nobody else can stand in for it
peers.py        who a peer is, by the kernel's word
limits.py       how much of anything, and the log of what was refused
jobs.py         the jobs that joined
questions.py    Slurm is asked on a thread of its own
requests.py     what each message gets
connection.py   one connection
server.py       the thread that serves them all
"""
