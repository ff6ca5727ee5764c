// Both types of 16 bits are in one file.
#include "cuda_fp16.h"
