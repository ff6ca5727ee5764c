/* Times MPI's start-up: rank 0 prints the milliseconds from START_NS (nanoseconds since 1970, in the environment)
   to the end of the first MPI_Allreduce. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    float x = 1;
    MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    if (x != (float)world) MPI_Abort(MPI_COMM_WORLD, 1);
    const char *start = getenv("START_NS");
    if (rank == 0 && start) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        printf("ms %.2f\n", now.tv_sec * 1e3 + now.tv_nsec / 1e6 - strtoll(start, NULL, 10) / 1e6);
    }
    MPI_Finalize();
    return 0;
}
