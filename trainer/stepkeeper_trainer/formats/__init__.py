"""What training ranks and the supervisor both read and write: files and messages, each declared once.

Nothing here may import torch or another part of either package: the supervisor loads it on a machine
without torch, and the trainer library inside the user's own environment.
"""
