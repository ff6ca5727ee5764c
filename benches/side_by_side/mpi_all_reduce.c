/* Times MPI_Allreduce of floats like the other programs of this folder: one checked call, then for each
   repetition a barrier and ITERATIONS calls on the same buffers.

   Usage: mpirun -n WORLD mpi_all_reduce NAME BYTES ITERATIONS REPETITIONS
   Prints: NAME WORLD BYTES BEST MEDIAN, times in microseconds a call. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, world;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);
    if (argc != 5) MPI_Abort(MPI_COMM_WORLD, 2);
    const char *name = argv[1];
    size_t bytes = strtoull(argv[2], NULL, 10);
    int iterations = atoi(argv[3]), repetitions = atoi(argv[4]), count = (int)(bytes / sizeof(float));
    float *buffer = malloc(bytes);
    double *times = malloc((size_t)repetitions * sizeof *times);
    if (!buffer || !times || count < 1 || iterations < 1 || repetitions < 1) MPI_Abort(MPI_COMM_WORLD, 2);

    for (int i = 0; i < count; i++) buffer[i] = (float)(rank + 1);
    MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    float sum = (float)(world * (world + 1) / 2);
    for (int i = 0; i < count; i++)
        if (buffer[i] != sum) MPI_Abort(MPI_COMM_WORLD, 1);
    /* Sums of zeros stay zero. */
    for (int i = 0; i < count; i++) buffer[i] = 0;

    for (int repetition = 0; repetition < repetitions; repetition++) {
        MPI_Barrier(MPI_COMM_WORLD);
        double start = MPI_Wtime();
        for (int i = 0; i < iterations; i++)
            MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        times[repetition] = (MPI_Wtime() - start) / iterations * 1e6;
    }
    qsort(times, (size_t)repetitions, sizeof *times, ascending);
    if (rank == 0)
        printf("%s %d %zu %.3f %.3f\n", name, world, bytes, times[0], times[repetitions / 2]);
    MPI_Finalize();
    return 0;
}
