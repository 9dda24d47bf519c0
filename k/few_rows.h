/* All products, of a few rows, on processors without AVX-512 VNNI and AVX2; see few_rows.c. */
#ifndef JQINJECT_FEW_ROWS_H
#define JQINJECT_FEW_ROWS_H

#include "product.h"

HIDDEN kernel few_rows_of_integers, few_rows_of_groups, few_rows_of_floats;

#endif
