"""One save, from the tensors of a step to a committed step directory.

staging -> planner -> files -> writer -> report -> complete -> commit
"""
