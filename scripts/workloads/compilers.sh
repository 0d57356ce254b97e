# Needs: gcc

cat > m.c <<'END'
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static void *work(void *p) { return malloc(100000); }
int main(void) { pthread_t t[4]; for (int i = 0; i < 4; i++) pthread_create(t + i, 0, work, 0);
  for (int i = 0; i < 4; i++) pthread_join(t[i], 0); FILE *f = tmpfile(); fputs("x", f); puts("fine"); return system("true"); }
END
gcc -O2 -pthread -o m m.c && ./m && printf 'all: m\n\t./m\nm: m.c\n\tgcc -pthread -o m m.c\n' > Makefile && touch m.c && make -j2 && ar rcs l.a m && strip m
