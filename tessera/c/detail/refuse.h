/* For the part in C that Fortran calls through: fails with TESSERA_ERROR_ARGUMENT and this text,
 * and tells the other ranks of the only job. */
#ifndef TESSERA_C_DETAIL_REFUSE_H
#define TESSERA_C_DETAIL_REFUSE_H

#include "tessera/c/tessera.h"

#ifdef __cplusplus
extern "C" {
#endif
tessera_result tessera_refuse(const char* name, const char* text);
#ifdef __cplusplus
}
#endif

#endif
