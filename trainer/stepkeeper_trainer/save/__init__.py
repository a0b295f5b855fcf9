"""One save, from the tensors of a step to a committed step directory.

staging -> planner -> persist -> writer -> report -> commit
"""
