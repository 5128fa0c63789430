"""Every absolute tolerance of the suite, each a few times the largest error that was measured."""

LOGITS = {"float32": 1e-3, "float64": 1e-8}  # against the golden float64 logits; measured 1.8e-4 and 4e-13
STATE = {"float32": 2e-4, "float64": 1e-6}  # KDA memory and windows against golden values that are stored as float32

# Single operations against float64 oracles and golden numbers.
NORM = {"float32": 4e-6, "float64": 8e-15}  # measured 9.5e-7 and 1.8e-15
SITU = {"float32": 5e-5, "float64": 2e-12}  # values up to 100; measured 1.2e-5 and 4.7e-13
LINEAR = {"float32": 2e-6, "float64": 4e-15}  # measured 4.8e-7 and 8.9e-16
MLP_OUTPUT = {"float32": 4e-5, "float64": 6e-14}  # values up to 65; measured 8.6e-6 and 1.4e-14
KDA_STEP = {"float32": 1e-6, "float64": 1e-14}
KDA_CHUNKED = {"float32": 1e-6, "float64": 1e-14}
KDA_GRADIENT = {"float32": 1e-6, "float64": 1e-14}
KDA_LAYER = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-6}
KDA_GATE = {"float32": 1e-6, "float64": 1e-14}
CONVOLVE = {"float32": 1e-6, "float64": 1e-14}
INVERSE = {"float32": 1e-6, "float64": 1e-14}
EXACT = 1e-9  # two ways of computing the same numbers in float64: logits and states; measured up to 1e-12
MIX = {"float32": 1e-6, "float64": 1e-14}
SKELETON = {"float32": 1e-6, "float64": 1e-14}
ATTENTION = {"float32": 1e-6, "float64": 1e-14}
ATTENTION_BF16 = {"float32": 1e-6, "bfloat16": 1e-6}
MLA_LAYER = {"float32": 1e-6, "float64": 1e-14}
DRIFT = {"float32": 1e-6}
INDEX_SCORE = {"float32": 1e-6, "float64": 1e-14}
ROUTE = {"float32": 1e-6, "float64": 1e-14}
EXPERTS = {"float32": 1e-6, "float64": 1e-14}
MOE_LAYER = {"float32": 1e-6, "float64": 1e-14, "bfloat16": 1e-6}
