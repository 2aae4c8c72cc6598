from vitrail_course.errata.erratum import page

if __name__ == "__main__":
    print(page(), end="")
