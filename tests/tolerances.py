"""Every absolute tolerance of the suite, each a few times the largest error that was measured."""

# against the golden float64 logits, over all placements; measured 1.8e-4 and 4e-13
LOGITS = {"float32": 1e-3, "float64": 1e-9}
NEAR = {"float32": 3e-4, "float64": 1e-9}  # 99 % of tokens
SIX = {"float32": 1e-4, "float64": 1e-9}  # six tokens of a prompt without near ties
# KDA memory and windows against golden values that are stored as float32
STATE = {"float32": 2e-4, "float64": 1e-6}

# Single operations against float64 oracles and golden numbers.
NORM = {"float32": 4e-6, "float64": 8e-15}  # measured 9.5e-7 and 1.8e-15
SITU = {"float32": 5e-5, "float64": 2e-12}  # values up to 100; measured 1.2e-5 and 4.7e-13
LINEAR = {"float32": 2e-6}  # measured 4.8e-7
MLP_OUTPUT = {"float32": 4e-5, "float64": 6e-14}  # values up to 65; measured 8.6e-6 and 1.4e-14
KDA_STEP = {"float32": 3e-6, "float64": 4e-15}  # measured 8.6e-7 and 1.1e-15
KDA_CHUNKED = {"float32": 8e-6, "float64": 1.5e-14}  # measured 2.4e-6 and 3.6e-15
KDA_GRADIENT = {"float32": 6e-6, "float64": 1.5e-14}  # measured 1.6e-6 and 3.8e-15
KDA_LAYER = {"float32": 1e-5, "float64": 1.5e-14}  # measured 3.1e-6 and 4.4e-15
KDA_GATE = {"float32": 3e-6, "float64": 1.2e-14}  # measured 8.9e-7 and 3.6e-15
CONVOLVE = {"float32": 1.2e-6, "float64": 5e-16}  # measured 3.4e-7 and 1.1e-16
INVERSE = {"float32": 1e-6, "float64": 4e-15}  # measured 2.4e-7 and 1.1e-15
# two ways of computing the same numbers in float64: logits and states; measured up to 1e-12
EXACT = 1e-9
MIX = {"float32": 6e-5, "float64": 1.5e-13}  # values up to 90; measured 1.8e-5 and 4.3e-14
SKELETON = {"float32": 1.5e-4, "float64": 1.2e-13}  # measured 4.0e-5 and 3.2e-14
ATTENTION = {"float32": 6e-6, "float64": 1.2e-14}  # measured 1.8e-6 and 3.6e-15
ATTENTION_BF16 = {"float32": 5e-5, "bfloat16": 0.03}  # scores to 60; measured 1.4e-5 and 0.0091
MLA_LAYER = {"float32": 5e-6, "float64": 1.5e-14}  # measured 1.3e-6 and 4.0e-15
DRIFT = {"float32": 0.1}  # normalised bfloat16 values; measured 0.039
INDEX_SCORE = {"float32": 6e-6, "float64": 1.2e-14}  # measured 1.8e-6 and 3.6e-15
ROUTE = {"float32": 6e-7, "float64": 2e-15}  # measured 1.8e-7 and 4.4e-16
EXPERTS = {"float32": 3e-5, "float64": 8e-14}  # measured 8.8e-6 and 2.1e-14
# measured 2.5e-6, 3.9e-14 and 0.039
MOE_LAYER = {"float32": 1e-5, "float64": 1.5e-13, "bfloat16": 0.12}
MOE_MESH = {"float64": 4e-14, "bfloat16": 0.12}  # measured 1.0e-14 and 0.040
CHOSEN_SUMS = 1e-5  # float32, logits up to 3, by two reductions; measured 2.2e-6
PATHS = 3e-5  # float32 log-probabilities of generated ids, over all paths; measured 6.5e-6
# The vision tower and its projector against golden numbers: rows of about unit size.
VISION = {"float32": 1e-4, "float64": 1e-11}  # measured 6.5e-6 and 6e-15
VISION_STORED = 1e-6  # golden values that are stored as float32; measured 3.4e-7
