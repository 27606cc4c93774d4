/* Networks for the tests in C and Fortran (models.cpp). */
#ifdef __cplusplus
extern "C" {
#endif
/* Registers "net" (one tensor in and out), "two" (two in, two out) and "none" (gives nothing). */
void test_models(void);
/* Writes a TorchScript file of a network; not 0 where it cannot. */
int test_script(const char* path);
#ifdef __cplusplus
}
#endif
