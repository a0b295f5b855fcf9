"""What a person learns of a training: metrics, stacks, slow ranks, and signs that a resume went another way."""
