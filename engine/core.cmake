# Block accounting and scheduling: plain single-threaded code.
find_package(OpenSSL REQUIRED)
