"""What researchers ask of a model: log-probabilities, hidden states, gradients."""
